"""Floor 3: text to ids and back, chat templates."""
