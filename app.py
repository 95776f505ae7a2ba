"""`python app.py --model-path … --inference-engine fp16 --port 8000`: the server, without its command's name."""

import sys

from rwkv_lightning.core.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["serve"]))
