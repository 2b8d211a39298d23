"""Run: the operators `kronecell::*` with their references, and the engine that turns plans into calls of them."""
