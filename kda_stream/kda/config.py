"""`KdaConfig`: the geometry of a model's KDA layers, from its config.json."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigError, ErrorCode, in_words
from ..files import read_small_file
from ..foreign import not_json
from ..jsontext import parse_json
from ..limits import CONFIG_BYTES_MAX, INTEGER_MAX
from ..require import require_kind, require_path

TEXT_CONFIG: Final = "text_config"

# Where the geometry stands: in the published files of GLM-5.3-Flash, Kimi-Linear and Kimi-K3, and
# as the transformers library saves a model with KDA layers.
SPELLINGS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "hidden": (("hidden_size",),),
    "heads": (("linear_attn_config", "num_heads"), ("linear_num_heads",)),
    "head_dim": (("linear_attn_config", "head_dim"), ("linear_head_dim",)),
    "conv_kernel": (("linear_attn_config", "short_conv_kernel_size"), ("linear_conv_kernel_dim",)),
}

_WORDS: Final = {
    "hidden": "hidden size",
    "heads": "heads",
    "head_dim": "head dim",
    "conv_kernel": "conv kernel",
}

# In the published files of Ling-3.0, whose KDA layers have the heads of all attention. Elsewhere
# these keys are those of another attention, so they count beside this sign only, and only where
# none of the spellings above is given.
GROUPED_SIGN: Final = "layer_group_size"
GROUPED_SPELLINGS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "heads": (("num_attention_heads",),),
    "head_dim": (("head_dim",),),
    "conv_kernel": (("short_conv_kernel_size",),),
}


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """The geometry of a KDA layer; every field is a positive count of elements.

    `hidden` is the model's width X, `heads` H, `head_dim` D, `conv_kernel` K. Raises `ConfigError`
    for anything but positive ints.

    Example: `KdaConfig(hidden=4096, heads=64, head_dim=128, conv_kernel=4).qkv_dim == 8192`.
    """

    hidden: int
    heads: int
    head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        for name in SPELLINGS:
            _checked_count(getattr(self, name), name, None)

    @property
    def qkv_dim(self) -> int:
        """Q = heads * head_dim: the rows of each of q, k and v."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """3 * qkv_dim: the rows of the joined convolution."""
        return 3 * self.qkv_dim

    @classmethod
    def from_json(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> KdaConfig:
        """Read the geometry from a config.json, given as its path or as the parsed object.

        It may stand at the top or in `text_config`, spelled `linear_attn_config.num_heads` or
        `linear_num_heads` (and so on), or, beside a `layer_group_size`, `num_attention_heads`,
        `head_dim` and `short_conv_kernel_size`. Raises `ConfigError` when a value is missing, is no
        positive int, or is given twice with different values; `PathError` when there is no such
        file.
        """
        path = None if isinstance(config, Mapping) else require_path(config)
        document = config if isinstance(config, Mapping) else read_config(config)
        return cls(**{name: _geometry(document, name, path) for name in SPELLINGS})


def require_config(config: object) -> None:
    """Raise `ArgumentError` when `config` is no `KdaConfig`."""
    hint = "pass KdaConfig.from_json(path), which takes the parsed object too"
    require_kind("config", config, KdaConfig, "a KdaConfig", hint)


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The JSON object in the config file `path`.

    Raises `PathError` when it cannot be read, `ConfigError` when it is no JSON object.
    """
    text = read_small_file(path, CONFIG_BYTES_MAX)
    try:
        document = parse_json(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        found = not_json(text, error)
        raise ConfigError(
            ErrorCode.CONFIG_NOT_JSON,
            f"the config is {found.fault}",
            path=path,
            got=found.got,
            hint=found.hint or "fetch the checkpoint's config.json again",
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(
            ErrorCode.CONFIG_NOT_JSON,
            "the config is no JSON object",
            path=path,
            expected="an object",
            got=type(document).__name__,
            hint="fetch the checkpoint's config.json again",
        )
    return document


def hidden_layer_count(config: Mapping[str, Any], path: object = None) -> int | None:
    """`num_hidden_layers`: decoder layers, the MTP layers behind them not counted; None if absent.

    Raises `ConfigError` when it is no positive int or is given twice with different values.
    """
    return _agreed(config, "num_hidden_layers", (("num_hidden_layers",),), path)


def _geometry(config: Mapping[str, Any], name: str, path: object) -> int:
    spellings = SPELLINGS[name]
    value = _agreed(config, name, spellings, path)
    if value is None and next(_given(config, ((GROUPED_SIGN,),)), None) is not None:
        value = _agreed(config, name, GROUPED_SPELLINGS.get(name, ()), path)
    if value is None:
        raise ConfigError(
            ErrorCode.CONFIG_KEY_MISSING,
            f"the config does not give the {_WORDS[name]} of its KDA layers",
            path=path,
            expected=" or ".join(".".join(keys) for keys in spellings),
            hint="is this the config.json of a model with KDA layers?",
        )
    return value


def _agreed(
    config: Mapping[str, Any], name: str, spellings: tuple[tuple[str, ...], ...], path: object
) -> int | None:
    """The one value that all the places which give it agree on; None when none does."""
    found = {}
    for where, value in _given(config, spellings):
        found[where] = _checked_count(value, where, path)
    if len(set(found.values())) > 1:
        raise ConfigError(
            ErrorCode.CONFIG_CONTRADICTION,
            f"the config contradicts itself on {name}",
            path=path,
            expected="one value",
            got=", ".join(f"{where} = {value}" for where, value in found.items()),
            hint="find out which of them the weights were made with, and remove the other",
        )
    return next(iter(found.values()), None)


def _given(
    config: Mapping[str, Any], spellings: tuple[tuple[str, ...], ...]
) -> Iterator[tuple[str, Any]]:
    for root in ((), (TEXT_CONFIG,)):
        for keys in spellings:
            value: Any = config
            for key in (*root, *keys):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                yield ".".join((*root, *keys)), value


def _checked_count(value: Any, name: str, path: object) -> int:
    if type(value) is not int or not 0 < value <= INTEGER_MAX:
        raise ConfigError(
            ErrorCode.CONFIG_VALUE,
            f"{name} is no positive integer",
            path=path,
            expected="a positive integer",
            got=in_words(value, repr),
            hint="give the extents of the KDA layers as the model's config.json has them"
            if path is None
            else "fetch the checkpoint's config.json again",
        )
    return value
