"""`python -m splitroll`."""

import sys

from splitroll.cli import main

sys.exit(main())
