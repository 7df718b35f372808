"""vLLM 0.33.0: the plugin, the deployment check, the binding to its model. The only package that imports vLLM."""
