"""python -m kronecell."""

from kronecell.cli import main

if __name__ == "__main__":
    main()
