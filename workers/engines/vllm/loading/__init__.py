"""What puts weights into vLLM's model (`transfer`), all at once or in place, and knows how vLLM lays them out."""
