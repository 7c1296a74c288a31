"""`python -m kareus_pp.launch`; see `kareus_pp.launch._run`."""

from kareus_pp.launch._run import main

if __name__ == "__main__":
    main()
