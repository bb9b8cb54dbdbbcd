"""Static router mode: stock vLLM servers behind the stock vllm-router, under the same Rollout."""
