"""`python -m p2pdiloco`: the same as the console script."""

from p2pdiloco.cli.main import main

if __name__ == "__main__":
    main()
