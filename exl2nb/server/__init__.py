"""Floor 7: HTTP. OpenAI's, Anthropic's and TabbyAPI's routes over one engine; uvicorn and FastAPI, from the extra `server`."""
