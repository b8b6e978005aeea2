"""``python -m services.launcher``: the `treadle` command without its installed script."""

import sys

from services.launcher.cli import main

sys.exit(main())
