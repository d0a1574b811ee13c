"""The page at `/`: static files that read the server's JSON routes. See `docs/page.md`."""
