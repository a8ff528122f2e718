"""A worker of `fastbert tune` that computes nothing: its answers are in a file.

    python _tune_table.py FILE

The file has the seconds of the forward and the backward of each candidate by name. A text instead
of the seconds is what parity says, except "hang" and "die".
"""

import json
import os
import sys
import time

with open(sys.argv[1], encoding="utf-8") as file:
    TABLE = json.load(file)

for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "check":
        said = TABLE[request["candidate"]["name"]]
        if said == "hang":
            time.sleep(3600)
        if said == "die":
            os._exit(3)
        answer = {"problem": said if isinstance(said, str) else None}
    else:
        times = {c["name"]: TABLE[c["name"]] for c in request["candidates"]}
        answer = {"problem": None, "times": times}
    print(json.dumps(answer), flush=True)
