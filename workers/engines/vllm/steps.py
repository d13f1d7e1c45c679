"""Reads the scheduler's figures after each step of vLLM: running requests, cache usage, tokens, accepted drafts.

vLLM's own interface for them, a stat logger, brings in its Prometheus exporter and inspects every token of every
request, on the event loop that also serves requests. Here the engine's messages are read as they pass, once per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM

_LATEST_DRAFTED = 20_000  # tokens


class StepWatch:
    """The latest scheduler figures; written and read on the event loop."""

    def __init__(self) -> None:
        self.num_made = 0  # tokens generated since the start
        self.num_running = 0
        self.kv_used = 0.0  # 0 to 1
        self._drafted, self._accepted = 0.0, 0.0  # tokens, the latest ones

    @property
    def drafts_accepted(self) -> float | None:
        """Return the fraction of the latest drafted tokens that the model accepted; None if nothing was drafted."""
        return self._accepted / self._drafted if self._drafted else None

    def record(self, outputs: EngineCoreOutputs) -> None:
        self.num_made += sum(len(output.new_token_ids) for output in outputs.outputs)
        if (stats := outputs.scheduler_stats) is not None:
            self.num_running = stats.num_running_reqs
            self.kv_used = stats.kv_cache_usage
            if (drafts := stats.spec_decoding_stats) is not None:
                self._note_drafts(drafts.num_draft_tokens, drafts.num_accepted_tokens)

    def _note_drafts(self, drafted: int, accepted: int) -> None:
        self._drafted, self._accepted = self._drafted + drafted, self._accepted + accepted
        if self._drafted > _LATEST_DRAFTED:
            self._drafted, self._accepted = self._drafted / 2, self._accepted / 2


def watch_steps(llm: AsyncLLM) -> StepWatch:
    """Attach a StepWatch before the first request. Build the engine with `log_stats`, or it reports no figures."""
    watch = StepWatch()
    llm.log_stats, llm.logger_manager = False, None  # the scheduler still reports; only we read it
    llm.output_processor.log_stats = False
    pass_on = llm.engine_core.get_output_async

    async def get_output_async() -> EngineCoreOutputs:
        outputs: EngineCoreOutputs = await pass_on()
        watch.record(outputs)
        return outputs

    llm.engine_core.get_output_async = get_output_async
    return watch
