"""Floor 7: notebook widgets; the only room that imports Jupyter packages."""
