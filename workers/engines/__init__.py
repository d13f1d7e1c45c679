"""Generation engines behind one seam (`base`): vLLM, the small transformers one, and the double for tests."""
