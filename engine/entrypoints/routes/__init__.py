"""The routes of the server, one module a subject; `routing` finds the one that a request wants."""
