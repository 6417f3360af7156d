"""Floor 7: doors from other libraries. Each module needs the library it is named for, and no module here needs another."""
