"""Floor 4: what an answer must look like (schema, regex, choice, grammar), as masks over the vocabulary."""
