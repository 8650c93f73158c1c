"""The old command line: python main_trainer.py --dnn lstman4 --dataset an4 ... (oktopk train has every setting)."""

import sys

from oktopk.workbench.train.legacy import main

if __name__ == "__main__":
    sys.exit(main())
