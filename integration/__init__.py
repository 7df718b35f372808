"""vLLM's side of the executor: plugin, deployment check, binding to its model, model state. Imports nothing by itself:
it is loaded in every vLLM process."""
