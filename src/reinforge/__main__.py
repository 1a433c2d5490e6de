"""`python -m reinforge` is the command line."""

from reinforge.cli import main

if __name__ == "__main__":
    main(prog_name="reinforge")
