"""What vLLM's scheduler says after each of its steps: how many run and wait, how full the cache is, how many tokens.

vLLM's own way to these figures, a stat logger, brings its Prometheus exporter along and looks at every token of every
request, on the event loop that also answers requests. Here the engine's messages are read as they pass, once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.async_llm import AsyncLLM


class StepWatch:
    """The newest figures; written on the event loop, read there."""

    def __init__(self) -> None:
        self.num_made = 0  # tokens, since the start
        self.num_running = 0
        self.kv_used = 0.0  # 0 to 1

    def saw(self, outputs: EngineCoreOutputs) -> None:
        self.num_made += sum(len(output.new_token_ids) for output in outputs.outputs)
        if (stats := outputs.scheduler_stats) is not None:
            self.num_running = stats.num_running_reqs
            self.kv_used = stats.kv_cache_usage


def watch_steps(llm: AsyncLLM) -> StepWatch:
    """Before the first request; the engine must have been made with `log_stats`, or its scheduler is silent."""
    watch = StepWatch()
    llm.log_stats, llm.logger_manager = False, None  # the scheduler speaks all the same; nobody else listens
    llm.output_processor.log_stats = False
    pass_on = llm.engine_core.get_output_async

    async def get_output_async() -> EngineCoreOutputs:
        outputs: EngineCoreOutputs = await pass_on()
        watch.saw(outputs)
        return outputs

    llm.engine_core.get_output_async = get_output_async
    return watch
