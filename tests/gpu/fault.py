"""A CUDA process that writes to an invalid address: the driver reports an XID and ends its context.

The tests run it as a separate program. Other processes on the GPU are not affected.
"""

import sys

from gpuledger_cli.known_load.cuda_load import Cuda

PTX = b"""
.version 7.0
.target sm_60
.address_size 64
.visible .entry fault(.param .u64 address)
{
    .reg .u64 %address;
    ld.param.u64 %address, [address];
    st.global.u64 [%address], %address;
    ret;
}
\0"""
NOWHERE = 16

if __name__ == "__main__":
    try:
        Cuda(0, ptx=PTX, kernel=b"fault").spin(NOWHERE)
    except OSError as error:
        sys.stdout.write(f"{error}\n")
