"""`python -m heddle` is the command `heddle`."""

from __future__ import annotations

import sys

from heddle.cli.main import main

sys.exit(main())
