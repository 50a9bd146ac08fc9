"""A CUDA process that writes where no memory is: the driver reports an XID and ends its context.

Started by the tests as a program of its own. It harms nobody else on the GPU.
"""

import sys

from tests.gpu.load import Cuda

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
