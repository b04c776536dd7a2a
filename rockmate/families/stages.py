"""Backward stages that calls of several sizes have in common.

Measuring joins autograd nodes that need not be told apart: one that reads nothing that was saved joins the stage before
it where it does not raise that one's peak. Whether it does may depend on the sizes. A family has those stages alone
that all of its calls have: what is joined in one of them is joined in all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rkgb import KComp
from rkgb.ir.profiles import StageProfile, backward_stages
from rockmate.families.aligned import NotAligned
from rockmate.planning.measured import Measured, problem_of


def with_common_stages(members: Sequence[Measured]) -> list[Measured]:
    """The same calls, with the stages that all of them have. Raises `NotAligned` where their backwards differ."""
    nodes = [[stage.nodes for stage in backward_stages(member.graphs.profiles)] for member in members]
    orders = [list(itertools.chain(*stages)) for stages in nodes]
    if any(order != orders[0] for order in orders) or any(not all(stages) for stages in nodes):
        raise NotAligned("backward")
    ends = [list(itertools.accumulate(map(len, stages))) for stages in nodes]
    common = set(ends[0]).intersection(*ends[1:])
    return [_joined(member, [end in common for end in own]) for member, own in zip(members, ends, strict=True)]


def _joined(member: Measured, is_end: list[bool]) -> Measured:
    """`member` with each stage that is no end joined to the next."""
    if all(is_end):
        return member
    whole = member.graphs.K_graph
    profiles = []
    ends = iter(is_end)
    for profile in reversed(member.graphs.profiles):  # in the order of the backward
        stages = _grouped(profile.stages, ends, _stages_as_one)
        profiles.append(replace(profile, stages=tuple(stages)))
    backward = _grouped(whole.backward, iter(is_end), _as_one)
    graphs = replace(member.graphs, profiles=profiles[::-1], K_graph=replace(whole, backward=backward))
    problem, chain = problem_of(graphs, member.loss, member.residents, member.gradients)
    return replace(member, graphs=graphs, problem=problem, chain=chain)


def _grouped(stages: Iterable[Any], is_end: Iterator[bool], as_one: Callable[[Any, Any], Any]) -> list[Any]:
    found: list[Any] = []
    begins = True
    for stage in stages:
        if begins:
            found.append(stage)
        else:
            found[-1] = as_one(found[-1], stage)
        begins = next(is_end)
    return found


def _as_one(first: KComp, second: KComp) -> KComp:
    """Two stages as one, as measuring joins them (`rkgb.profile.timeline`): the second reads nothing that was saved."""
    if any(data.kind != "grad" for data in second.deps):
        raise NotAligned(second.name)
    return replace(
        first,
        time_ms=first.time_ms + second.time_ms,
        outputs={**first.outputs, **second.outputs},
        peak_bytes=max(first.peak_bytes, second.peak_bytes),
    )


def _stages_as_one(first: StageProfile, second: StageProfile) -> StageProfile:
    return replace(
        first,
        time_ms=first.time_ms + second.time_ms,
        peak_bytes=max(first.peak_bytes, second.peak_bytes),
        nodes=(*first.nodes, *second.nodes),
    )
