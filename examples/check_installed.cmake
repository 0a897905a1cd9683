# Installs Spolia into a folder of the build tree, moves it, builds the examples with what is there, and compares what they
# write with the digests by PyTorch.
cmake_minimum_required(VERSION 3.25)

# must_run(COMMAND...): what the command prints, in `output`. Where it fails, so does the test.
macro(must_run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${result}:\n${output}${errors}")
  endif()
endmacro()

file(REMOVE_RECURSE ${WORK})
must_run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/installed)

# The headers need nothing that is not installed.
file(GLOB_RECURSE headers RELATIVE ${WORK}/installed/include ${WORK}/installed/include/*.h)
list(TRANSFORM headers REPLACE "(.+)" "#include \"\\1\"")
list(JOIN headers "\n" includes)
file(WRITE ${WORK}/headers.cc "${includes}\n")
must_run(${COMPILER} -std=c++20 -fsyntax-only -I ${WORK}/installed/include ${WORK}/headers.cc)
if(includes MATCHES "gtest|testing|test_")
  message(FATAL_ERROR "headers of tests are installed: ${includes}")
endif()

if(SANITIZE)
  set(flags -D CMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
endif()
foreach(example convert reshard_job save_and_load train_lm)
  must_run(${CMAKE_COMMAND} -S ${SOURCE}/examples/${example} -B ${WORK}/${example} -G ${GENERATOR} ${flags}
           -D CMAKE_PREFIX_PATH=${WORK}/installed -D CMAKE_BUILD_TYPE=${CONFIG}
           -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
  must_run(${CMAKE_COMMAND} --build ${WORK}/${example})
endforeach()

set(case ${SOURCE}/tests/data/torch-2.14/fsdp2-4)
file(READ ${case}/expected.json expected)

# expect_digests(CHECKPOINT PREFIX): its tensors are those that PyTorch has under names that begin with the prefix.
function(expect_digests checkpoint prefix)
  must_run(${WORK}/installed/bin/spolia digest ${checkpoint} --json)
  string(JSON tensors LENGTH "${output}")
  if(tensors LESS 20)
    message(FATAL_ERROR "${checkpoint} has only ${tensors} tensors")
  endif()
  math(EXPR last "${tensors} - 1")
  foreach(index RANGE ${last})
    string(JSON name MEMBER "${output}" ${index})
    string(JSON found GET "${output}" ${name} sha256)
    string(JSON wanted GET "${expected}" tensors ${prefix}${name} sha256)
    if(NOT found STREQUAL wanted)
      message(FATAL_ERROR "${name}: ${found} was written where PyTorch has ${wanted}")
    endif()
  endforeach()
endfunction()

must_run(${WORK}/convert/export_model ${case}/checkpoint model ${WORK}/model)
expect_digests(${WORK}/model model.)

execute_process(COMMAND ${WORK}/save_and_load/save_and_load WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS ${WORK}/run/latest)
  message(FATAL_ERROR "save_and_load left no checkpoint")
endif()
must_run(${WORK}/train_lm/train_lm ${SOURCE}/README.md --mesh 2x1 --steps 2 --batch 2)

# expect_resharded(FOLDER COMMAND...): the command reshards the checkpoint into the folder.
function(expect_resharded folder)
  file(MAKE_DIRECTORY ${WORK}/${folder})
  must_run(${ARGN} ${case}/checkpoint ${WORK}/${folder})
  if(NOT output MATCHES "every tensor of all three is equal")
    message(FATAL_ERROR "reshard_job said:\n${output}")
  endif()
  foreach(mesh on-2x2 on-3 on-1)
    expect_digests(${WORK}/${folder}/${mesh} "")
  endforeach()
endfunction()

expect_resharded(threads ${WORK}/reshard_job/reshard_job)
if(MPIEXEC)
  file(GLOB_RECURSE plugin ${WORK}/installed/libspolia_mpi.so)
  get_filename_component(plugins "${plugin}" DIRECTORY)
  expect_resharded(processes ${CMAKE_COMMAND} -E env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
                   OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
                   SPOLIA_PLUGIN_PATH=${plugins} ${MPIEXEC} -n 4 ${WORK}/reshard_job/reshard_job)
endif()
