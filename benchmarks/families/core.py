"""What makes a tiny model of a family: its configuration from shared sizes, dropout switched on, one batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from rkgb.tree import leaves

BATCH, LENGTH = 4, 64
WIDTH, HEADS, LAYERS, FFN = 64, 4, 4, 128
VOCABULARY, POSITIONS = 128, 128
PAD, BEGIN, END = 0, 1, 2
FIRST_WORD = 4  # tokens below it mean something to some model
DROPOUT = 0.1

Batch = dict[str, Any]

# Sizes under the names that configurations give them. Activations of a batch outweigh the parameters.
_SIZES: Sequence[tuple[int | bool, str]] = (
    (WIDTH, "hidden_size d_model n_embd emb_dim dim embedding_size word_embed_proj_dim attention_hidden_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers"),
    (LAYERS // 2, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers"),
    (HEADS // 2, "num_key_value_heads num_kv_heads"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (WIDTH // HEADS, "head_dim d_kv d_head"),
    (FFN, "intermediate_size d_ff d_inner ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim ffn_hidden_size"),
    (FFN, "dim_feedforward inner_dim"),
    (VOCABULARY, "vocab_size"),
    (POSITIONS + 8, "max_position_embeddings n_positions max_seq_len max_sequence_length"),
    (POSITIONS + 8, "max_source_positions max_target_positions"),
    (False, "use_cache"),  # as trainers have it
    (PAD, "pad_token_id"),
    (BEGIN, "bos_token_id decoder_start_token_id"),
    (END, "eos_token_id"),
)
SIZES = {name: size for size, names in _SIZES for name in names.split()}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: how to make a tiny one in training mode, and a batch with labels where it takes them."""

    name: str
    kind: str  # what it is for: "decoder", "vision", …
    make: Callable[[], tuple[torch.nn.Module, Batch]]
    config: str = ""  # the library's class of its configuration, where that is not `<name>Config`

    @property
    def note(self) -> str:
        """What of its own settings is not as a user would find it."""
        return note_of(self.config or f"{self.name}Config")


def config(name: str, **own: Any) -> Any:
    """The library's configuration class `name` with the shared sizes that it knows, its dropouts on, and `own`."""
    kind = getattr(transformers, name)
    known = inspect.signature(kind.__init__).parameters
    settings: dict[str, Any] = {key: value for key, value in SIZES.items() if key in known}
    settings |= {key: DROPOUT for key, given in known.items() if _is_dropout(key, given.default)}
    settings |= {key: 0.0 for key in known if _drops_layers(key)}
    if "mask_time_prob" in known:
        settings["apply_spec_augment"] = False
    return kind(**{**settings, **own})


def _is_dropout(key: str, default: Any) -> bool:
    """Whether `key` is the probability of a dropout."""
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return "drop" in key and is_number and not _drops_layers(key)


def _drops_layers(key: str) -> bool:
    """Whether `key` is the probability with which Python leaves out a layer: no plan follows that."""
    return "layerdrop" in key or "layer_drop" in key


def note_of(name: str) -> str:
    """What of the settings of configuration class `name` is not as a user would find it."""
    known = inspect.signature(getattr(transformers, name).__init__).parameters
    dropping = {key: given.default for key, given in known.items() if _drops_layers(key)}
    changed = [f"{key}=0 instead of {default:g}" for key, default in dropping.items() if default]
    if "mask_time_prob" in known and ("apply_spec_augment" not in known or known["apply_spec_augment"].default):
        changed.append("apply_spec_augment=False: NumPy draws its masks")
    return ", ".join(changed)


def model(name: str, settings: Any) -> torch.nn.Module:
    """An instance of the library's class `name` with weights from seed 0, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: torch.nn.Module = getattr(transformers, name)(settings)
    return made.train()


def drawn(seed: int = 0) -> torch.Generator:
    """A generator for data."""
    return torch.Generator().manual_seed(seed)


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0, limit: int = VOCABULARY) -> Tensor:
    """Random words."""
    return torch.randint(FIRST_WORD, limit, (batch, length), generator=drawn(seed))


def floats(*shape: int, seed: int = 0) -> Tensor:
    """Normal noise."""
    return torch.randn(*shape, generator=drawn(seed))


def images(size: int = 64, batch: int = BATCH, channels: int = 3) -> Tensor:
    """Random pixels."""
    return floats(batch, channels, size, size)


def classes(batch: int = BATCH, count: int = 2, seed: int = 1) -> Tensor:
    """A label for each of a batch."""
    return torch.randint(count, (batch,), generator=drawn(seed))


def padded(length: int = LENGTH, batch: int = BATCH) -> Batch:
    """Sentences of several lengths, and the mask that says so."""
    lengths = torch.linspace(length, length // 2, batch).long()
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return {"input_ids": tokens(batch, length) * mask, "attention_mask": mask}


def loss_of(output: Any) -> Tensor:
    """The model's own loss; of one that has none, the mean square of all that it returns."""
    own = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(own, Tensor):
        return own.sum()
    return torch.stack([t.float().square().mean() for t in leaves(output) if t.requires_grad]).sum()
