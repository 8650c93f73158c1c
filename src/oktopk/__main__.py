"""python -m oktopk"""

import sys

from oktopk.workbench.cli import main

sys.exit(main())
