"""The engine vLLM: `engine` runs in the worker, `plugin` and `loading.transfer` in the processes that vLLM starts."""
