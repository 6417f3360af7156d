"""The loaded model: loading, requests, chat, conversations, scores, memory plans."""
