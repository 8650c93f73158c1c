"""Words from people and for people: what is typed, what is shown."""
