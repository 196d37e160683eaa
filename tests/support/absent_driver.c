/* A libcuda for GPUs that are not there: it runs nothing, and refuses what a driver would refuse.
 *
 * A device's number is its compute capability times ten, so that one process can ask for several.
 */
#include <cuda.h>
#include <string.h>

static int launches;

/* Bytes of shared memory that one block may have, by capability (CUDA C++ programming guide, technical specifications). */
static int shared_limit(int device) {
  switch (device) {
    case 80: case 87: return 166912;
    case 90: case 100: case 103: return 232448;
    default: return 101376; /* 8.6, 8.9, 12.0 */
  }
}

static CUdevice current = 80;

/* Number of kernels launched so far. */
int absent_driver_launches(void) { return launches; }
/* Shared memory of a device, for launch code that asks torch. */
int absent_driver_shared_limit(int device) { return shared_limit(device); }
void absent_driver_use(int device) { current = device; }

CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { (void)context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { (void)limit; *value = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { (void)limit; (void)value; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  (void)device;
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_limit(device); break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_limit(device) + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device % 10; break;
    default: *value = 1024;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { (void)image; *module = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { (void)module; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  (void)module; (void)name;
  *function = (CUfunction)1;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  (void)function;
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function; (void)attribute; (void)value;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { (void)function; (void)config; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  (void)function; (void)config;
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument (the absent driver's)" : "an error of the absent driver";
  return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  (void)stream;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

/* Tensors of the host pass for the device's. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  (void)attribute;
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) {
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)data[i] = pointer;
    else *(int *)data[i] = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  (void)type; (void)element_strides; (void)interleave; (void)swizzle; (void)promotion; (void)fill;
  memset(map, 0, sizeof *map);
  if ((size_t)base % 16 || rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; i++) {
    if (box[i] == 0 || box[i] > 256 || sizes[i] == 0 || sizes[i] > (1ull << 32)) return CUDA_ERROR_INVALID_VALUE;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= (1ull << 40))) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  (void)function; (void)parameters; (void)extra;
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (!config->gridDimX || !config->gridDimY || !config->gridDimZ || config->gridDimX > 0x7fffffff) return CUDA_ERROR_INVALID_VALUE;
  if (config->gridDimY > 65535 || config->gridDimZ > 65535 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  if (config->sharedMemBytes > (unsigned)shared_limit(current)) return CUDA_ERROR_INVALID_VALUE;
  launches++;
  return CUDA_SUCCESS;
}
