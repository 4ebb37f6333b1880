import sys

from lintra.cli import main

sys.exit(main())
