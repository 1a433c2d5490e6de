"""Runs the command line with `python -m reinforge`."""

from reinforge.cli import main

if __name__ == "__main__":
    main(prog_name="reinforge")
