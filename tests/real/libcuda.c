/* CUDA's driver library for a load: kernels take their time, and each call is logged. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t spin_ns;

static int note(const char *name, unsigned long long value)
{
	FILE *log = fopen(getenv("LIBCUDA_LOG"), "a");

	fprintf(log, "%d %s %llu\n", getpid(), name, value);
	fclose(log);
	return 0;
}

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int index) { *device = index + 7; return index == 0 ? 0 : 101; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &spin_ns; return device != 7; }
int cuCtxSetCurrent(void *context)
{
	if (getenv("LIBCUDA_CRASH"))
		abort();
	return context != &spin_ns;
}
int cuModuleLoadData(void **module, const char *ptx)
{
	*module = &spin_ns;
	return strstr(ptx, ".entry spin(") ? 0 : 218;
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
	*function = &spin_ns;
	return module == &spin_ns && !strcmp(name, "spin") ? 0 : 500;
}
int cuMemAlloc_v2(uint64_t *pointer, size_t size)
{
	*pointer = 1;
	return size > 80ull << 30 ? 2 : note("alloc", size);
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra)
{
	if (function != &spin_ns || gx * gy * gz * bx * by * bz != 1 || shared || stream || extra)
		return 1;
	spin_ns = *(uint64_t *)parameters[0];
	return note("spin", spin_ns);
}
int cuCtxSynchronize(void)
{
	struct timespec time = {spin_ns / 1000000000, spin_ns % 1000000000};

	while (nanosleep(&time, &time))
		; /* a signal has come */
	return 0;
}
