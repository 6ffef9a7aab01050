"""`python -m mnist_trainer`."""

import sys

from .cli import main

sys.exit(main())
