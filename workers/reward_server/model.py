"""A sequence-classification model as reward model: loads it, and scores batches of rows of any length.

    reward = (sum_i attribute_weights[i] x output_i - reward_mean) / reward_std      of a single output: without the sum

The outputs are those of the head at the last token, as in transformers, or their mean over all tokens of a row.

Only this module of the reward server talks to transformers; server and training both use it, so that a text has the
same tokens and the same score in both. Blocks while the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import torch
import transformers
from safetensors import SafetensorError

from streamrl.config import schema
from streamrl.encoding import FROM_FILES, refuse_lone_tekken
from streamrl.errors import DataError
from streamrl.process import keep_freed_memory

Dtype = Literal["float32", "bfloat16"]
Row = Sequence[int]  # token ids
# On a CPU matrices of 512 rows are as fast as any, and larger batches need more padding.
_BUSY_TOKENS = {"cpu": 512, "cuda": 8192}


class RewardModel:
    def __init__(
        self, model: Any, tokenizer: transformers.PreTrainedTokenizerBase, settings: schema.RewardServer
    ) -> None:
        self.name = settings.model
        self.model = model
        self.tokenizer = tokenizer
        self._settings = settings
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        limits = (getattr(text_config, "max_position_embeddings", None), tokenizer.model_max_length)
        # A tokenizer without a limit reports 1e30.
        self.max_tokens: int | None = min((limit for limit in limits if limit and limit < 1e9), default=None)
        self.busy_tokens = _BUSY_TOKENS[model.device.type]

    @classmethod
    def load(
        cls,
        settings: schema.RewardServer,
        *,
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
        new_head: int | None = None,
    ) -> Self:
        """Load from a folder or the hub. `new_head`: start with a random head of so many outputs, as training does."""
        path = settings.model
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        tokenizer = _load_tokenizer(path, common)
        if new_head is not None:
            common |= {"num_labels": new_head, "ignore_mismatched_sizes": True}  # the model may have another head
        try:
            model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), output_loading_info=True, **common
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise DataError(f"cannot load a reward model from {path!r}: {_first_line(error)}") from None
        if info["missing_keys"] and new_head is None:
            raise DataError(
                f"the model {path!r} has no reward head ({', '.join(sorted(info['missing_keys'])[:3])} missing): "
                "train one with `streamrl reward train`"
            )
        _check_outputs(model, settings, may_be_several=new_head is not None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.config.use_cache = False
        return cls(model.to(device).eval(), tokenizer, settings)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows: list[list[int]] = self.tokenizer(list(texts), verbose=False)["input_ids"]
        start = self.tokenizer.bos_token_id  # a chat's template has written it already
        return [row[1:] if row[:2] == [start, start] else row for row in rows]

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:  # [B, outputs] float32
        pad = self._pad_for(rows)
        if pad is None:
            half = len(rows) // 2
            return torch.cat([self.forward(rows[:half]), self.forward(rows[half:])])
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self.model.device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        if self._settings.pool == "average":
            return self._averaged(**inputs)
        with self._padded_by(pad):
            logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()

    @torch.inference_mode()
    def score(self, rows: Sequence[Row]) -> list[float]:
        settings, outputs = self._settings, self.forward(rows)
        if settings.attribute_weights:
            outputs = outputs @ outputs.new_tensor(settings.attribute_weights)[:, None]
        return ((outputs[:, 0] - settings.reward_mean) / settings.reward_std).tolist()

    def _averaged(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        outputs: torch.Tensor = self.model.score(hidden).float()  # [B, T, outputs]
        counts = attention_mask[..., None]
        return (outputs * counts).sum(dim=1) / counts.sum(dim=1)

    def _pad_for(self, rows: Sequence[Row]) -> int | None:
        """Return the token to pad with.

        A decoder takes its last token that is not padding as the end of a row; without a padding token it takes the
        very last one, which works for single rows only. Padding with a token that no row ends with gives the same in a
        batch.
        """
        pad: int | None = self.model.config.get_text_config().pad_token_id
        if pad is not None:
            return pad
        ends = {row[-1] for row in rows}
        return next((token for token in range(self.vocab_size) if token not in ends), None)

    @contextmanager
    def _padded_by(self, pad: int) -> Iterator[None]:
        """Set the model's padding token for one forward pass."""
        config = self.model.config.get_text_config()
        own, config.pad_token_id = config.pad_token_id, pad
        try:
            yield
        finally:
            config.pad_token_id = own


def _load_tokenizer(path: str, common: dict[str, Any]) -> transformers.PreTrainedTokenizerBase:
    is_folder = Path(path).is_dir()
    if path.startswith(("/", ".", "~")) and not is_folder:  # no hub name starts like this
        raise DataError(f"no such model folder: {path!r}")
    try:
        tokenizer: transformers.PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            path, **common, **FROM_FILES
        )
    except (OSError, ValueError) as error:
        problem = f"no tokenizer in the model {path!r}"
        if not is_folder:
            problem = f"{path!r} is not a folder, and the hub has no tokenizer for it"
        raise DataError(f"{problem}: {_first_line(error)}") from None
    refuse_lone_tekken(tokenizer, path)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # For some model types, transformers builds this from a folder without a tokenizer.
        raise DataError(f"no tokenizer in the model {path!r}")
    return tokenizer


def _check_outputs(model: Any, settings: schema.RewardServer, *, may_be_several: bool) -> None:
    path, count, weights = settings.model, model.config.num_labels, settings.attribute_weights
    if weights and len(weights) != count:
        raise DataError(f"the model {path!r} has {count} outputs, but attribute_weights has {len(weights)} numbers")
    if count != 1 and not weights and not may_be_several:
        raise DataError(
            f"the model {path!r} has {count} outputs, but a reward is one number: set attribute_weights to sum them"
        )
    if settings.pool == "average" and not hasattr(model, "score"):
        raise DataError(f"the model {path!r} ({type(model).__name__}) has no head that scores tokens: use pool: last")


def prepare_process(threads: int | None) -> None:
    """Set up a process that only serves or trains a reward model: CPU threads, freed memory, and quiet transformers."""
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
