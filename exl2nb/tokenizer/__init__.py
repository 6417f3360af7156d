"""Floor 3: text to ids and back, streaming text, chat templates."""
