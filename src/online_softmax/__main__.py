"""`python -m online_softmax` is the command `online-softmax`. This file alone imports the lab."""

from online_softmax.lab.cli import main

if __name__ == "__main__":
    main()
