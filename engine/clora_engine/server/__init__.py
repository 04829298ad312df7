"""HTTP only: parses, asks the supervisor, answers."""
