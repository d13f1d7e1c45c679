"""The engine vLLM: `engine` runs in the worker, `plugin` and `loading` in the processes that vLLM starts."""
