"""What is shown of the executor inside vLLM on a GPU; `vllm_one_gpu.py` runs it."""
