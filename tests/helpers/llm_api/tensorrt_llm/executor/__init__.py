"""``tensorrt_llm.executor`` as far as it is used."""
