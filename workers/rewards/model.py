"""A sequence-classification model with one output, as reward model: loading it, and scoring batches of any lengths.

The one place of the reward room that talks to transformers; server and training both go through it, so that a text
means the same tokens and the same score to both. Blocks for as long as the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import torch
import transformers
from safetensors import SafetensorError

from streamrl.errors import DataError

Dtype = Literal["float32", "bfloat16"]
Row = Sequence[int]  # token ids


class RewardModel:
    def __init__(
        self,
        model: Any,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        name: str,
        reward_mean: float = 0.0,
        reward_std: float = 1.0,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self._mean, self._std = reward_mean, reward_std
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        limits = (getattr(text_config, "max_position_embeddings", None), tokenizer.model_max_length)
        # Tokenizers without a limit say 1e30.
        self.max_tokens: int | None = min((limit for limit in limits if limit and limit < 1e9), default=None)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
        new_head: bool = False,
        reward_mean: float = 0.0,
        reward_std: float = 1.0,
    ) -> Self:
        """From a folder or the hub. `new_head`: begin with a random reward head on the model, as training does."""
        if path.startswith(("/", ".", "~")) and not Path(path).is_dir():  # no hub name begins so
            raise DataError(f"no such model folder: {path!r}")
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **common)
        except (OSError, ValueError) as error:
            raise DataError(f"no tokenizer in the model {path!r}: {_first_line(error)}") from None
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            # What transformers makes of a folder that holds none, for some types of model.
            raise DataError(f"no tokenizer in the model {path!r}")
        if new_head:
            common["num_labels"] = 1
        try:
            model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, dtype), output_loading_info=True, **common
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise DataError(f"cannot load a reward model from {path!r}: {_first_line(error)}") from None
        if info["missing_keys"] and not new_head:
            raise DataError(
                f"the model {path!r} has no reward head ({', '.join(sorted(info['missing_keys'])[:3])} missing): "
                "train one with `streamrl reward train`"
            )
        if model.config.num_labels != 1:
            raise DataError(f"the model {path!r} has {model.config.num_labels} outputs; a reward model has one")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.config.use_cache = False
        return cls(model.to(device).eval(), tokenizer, name=path, reward_mean=reward_mean, reward_std=reward_std)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self.tokenizer(list(texts), verbose=False)["input_ids"]
        return ids

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:  # [B] float32, before standardisation
        pad = self._pad_for(rows)
        if pad is None:
            half = len(rows) // 2
            return torch.cat([self.forward(rows[:half]), self.forward(rows[half:])])
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self.model.device
        with self._padded_by(pad):
            logits: torch.Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0].float()

    @torch.inference_mode()
    def score(self, rows: Sequence[Row]) -> list[float]:
        return ((self.forward(rows) - self._mean) / self._std).tolist()

    def _pad_for(self, rows: Sequence[Row]) -> int | None:
        """The token to pad with.

        A decoder finds the end of a row as its last token that is not padding; one without a padding token takes the
        very last, and so only single rows. A token that no row ends with makes it do the same in a batch.
        """
        pad: int | None = self.model.config.get_text_config().pad_token_id
        if pad is not None:
            return pad
        ends = {row[-1] for row in rows}
        return next((token for token in range(self.vocab_size) if token not in ends), None)

    @contextmanager
    def _padded_by(self, pad: int) -> Iterator[None]:
        """For one forward pass, the model knows the padding token."""
        config = self.model.config.get_text_config()
        own, config.pad_token_id = config.pad_token_id, pad
        try:
            yield
        finally:
            config.pad_token_id = own


def prepare_process(threads: int | None) -> None:
    """For a process that is about reward models alone: how many CPU threads, and that only we speak to the user."""
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
