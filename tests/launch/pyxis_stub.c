/* Accepts the options of NVIDIA's Pyxis, as srun sees them, and notes their values in the file that
   PYXIS_STUB_LOG names. It starts no container: Enroot is not part of the tests. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis_stub, 1);

static const char *NAMES[] = {"container-image", "container-mounts", "container-workdir"};
static char *values[3];

static int keep(int index, const char *value, int remote)
{
    values[index] = strdup(value);
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "stub of pyxis", 1, 0, (spank_opt_cb_f)keep},
    {"container-mounts", "SOURCE:TARGET,...", "stub of pyxis", 1, 1, (spank_opt_cb_f)keep},
    {"container-workdir", "PATH", "stub of pyxis", 1, 2, (spank_opt_cb_f)keep},
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_user_init(spank_t spank, int ac, char **av)
{
    char path[4096];
    if (spank_getenv(spank, "PYXIS_STUB_LOG", path, sizeof path) != ESPANK_SUCCESS)
        return 0;
    FILE *file = fopen(path, "a");
    for (int index = 0; index < 3; index++)
        if (values[index])
            fprintf(file, "%s=%s\n", NAMES[index], values[index]);
    fclose(file);
    return 0;
}
