"""Families of the transformers library, each as a tiny model with random weights and dropout on."""

from __future__ import annotations

from benchmarks.families.core import Family
from benchmarks.families.senses import sense_families
from benchmarks.families.sequences import sequence_families
from benchmarks.families.text import text_families

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*text_families(), *sequence_families(), *sense_families())
}
