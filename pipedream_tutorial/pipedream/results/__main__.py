"""python -m pipedream.results: see pages.py."""

from pipedream.errors import main_with_errors
from pipedream.results.pages import main

if __name__ == "__main__":
    main_with_errors(main)
