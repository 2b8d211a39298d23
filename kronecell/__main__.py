"""python -m kronecell."""

from kronecell.cli.main import main

if __name__ == "__main__":
    main()
