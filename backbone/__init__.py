"""The plain DeepSeek-V4.1 text model: configuration, model folder, layers, paged caches, greedy loop."""
