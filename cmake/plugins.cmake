# Plugins: libraries that are loaded when they are asked for, each built where what it needs is installed. Nothing else
# is linked with it. They lie in lib/ of the build tree, where the command finds them as it does when installed.
include(GNUInstallDirs)
set_property(SOURCE spolia/comm/plugin.cc APPEND PROPERTY COMPILE_DEFINITIONS
             SPOLIA_LIBRARY_FOLDER="${CMAKE_INSTALL_LIBDIR}")
set(SPOLIA_PLUGIN_FOLDER ${PROJECT_BINARY_DIR}/lib)

function(spolia_plugin name)
  cmake_parse_arguments(ARG "" "" "SOURCES;USES" ${ARGN})
  add_library(${name} MODULE ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_USES})
  target_link_options(${name} PRIVATE LINKER:--as-needed)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
                        LIBRARY_OUTPUT_DIRECTORY ${SPOLIA_PLUGIN_FOLDER})
  install(TARGETS ${name} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

option(SPOLIA_MPI "build the MPI plugin, where MPI is installed" ON)
if(SPOLIA_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI COMPONENTS CXX)
endif()
if(MPI_CXX_FOUND)
  spolia_plugin(spolia_mpi SOURCES spolia/comm/mpi/mpi_plugin.cc USES MPI::MPI_CXX)
else()
  message(STATUS "the plugin spolia_mpi is not built: SPOLIA_MPI is ${SPOLIA_MPI}, and MPI is not found (Debian: libopenmpi-dev openmpi-bin)")
endif()
