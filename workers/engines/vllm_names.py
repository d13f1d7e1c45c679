"""The names by which we and vLLM's own processes find each other. Imports nothing: see `vllm_plugin`."""

from __future__ import annotations

WEIGHT_TRANSFER_BACKEND = "streamrl"
WORKER_EXTENSION = "streamrl.workers.proofs.read_back.ReadBackExtension"
READ_BACK = "streamrl_read_back"  # its method
OWNER_VARIABLE = "STREAMRL_VLLM_OWNER"  # pid of the worker, set by it before vLLM starts its processes
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"  # vLLM's own: where its processes meet; of this engine alone
