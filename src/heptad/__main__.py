"""`python -m heptad ...` is `heptad ...`; torchrun starts ranks this way."""

from __future__ import annotations

from heptad.cli.main import main

if __name__ == "__main__":
    main()
