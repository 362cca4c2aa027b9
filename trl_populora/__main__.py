"""`python -m trl_populora` is the command `populora`."""

from trl_populora.cli import main


if __name__ == "__main__":
    main()
